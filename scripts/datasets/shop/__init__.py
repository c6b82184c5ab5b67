"""The embedded catalogue: invented products, goals and instructions."""
