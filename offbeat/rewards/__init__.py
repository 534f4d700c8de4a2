"""Rewards: scores of completions, each a weighted sum of parts.

Whatever runs a user's code, a user's regex or reasoning-gym's graders runs in a child process with
a time limit. Read `scores` (the values), `combine` (the sum), `registry` (the parts), `scorer` (the
child).
"""
