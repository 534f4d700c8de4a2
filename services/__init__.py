"""The processes of Offbeat. A service imports `offbeat`, never another service."""
