"""Tests with real parts: Valkey, an S3 server, uvicorn, Celery workers, small real models."""
