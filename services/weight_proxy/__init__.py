"""Decides the order of policy versions and serves their files."""
