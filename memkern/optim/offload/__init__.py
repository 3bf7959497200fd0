"""An optimizer whose states and steps are on the host."""
