"""What `python -m specjax.run` is made of: options, sessions, the demonstration."""
