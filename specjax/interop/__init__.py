"""Conventions of other libraries."""
