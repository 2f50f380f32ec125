"""The measurements: what a step costs, what is kept of dense decoding; their results lie in `results/`."""
