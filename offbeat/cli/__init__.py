"""The `offbeat` command: what the client can do, for people and for scripts.

`main` has the commands, `session` what they share, `watch` the live view; `render` and `text` turn
values into what is printed and are pure.
"""
