"""Ways to compute a target's passes; each stands behind the protocols of `core/protocols.py`."""
