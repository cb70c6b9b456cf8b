"""Sharding: logical axes, meshes, models and loop state on them, several hosts."""
