"""What developers run by hand: mutations, and all that `make gpu` does."""
