"""The frozen models that cross a process boundary. They import pydantic and nothing else of ours.

Read in this order: `run_spec` (what a user asks for), `jobs` (what a worker is told and answers),
`weights` (what a policy version is), `rollouts` (what a generator writes), `runs` (what a user
reads), `chat` and `completions` (talking to a policy).
"""
