"""Scripts: flags, one call into moejax, rows out.

Run as `python -m experiments.NAME` from a checkout.
"""
