"""Models behind the framework-free `specjax.core.types.Model`."""
