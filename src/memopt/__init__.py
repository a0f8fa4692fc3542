"""memopt."""
