"""Turns rollouts into the next policy version."""
