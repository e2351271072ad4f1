"""Data sets by name, and data cut into clients."""
