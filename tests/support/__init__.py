"""What tests share: helpers, models, optimizer specs, pytest plugins; no tests."""
