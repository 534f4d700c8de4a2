"""Samples completions, scores them and writes rollouts."""
