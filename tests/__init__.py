"""Every test but the claims, which are `test_sfi.py` at the top."""
