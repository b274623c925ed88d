"""Programs around train.py: each starts it in fresh processes, or reads what it wrote."""
