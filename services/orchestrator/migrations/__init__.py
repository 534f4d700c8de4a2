"""The history of the schema; `migrate.py` applies it."""
