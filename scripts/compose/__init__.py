"""`make compose-test`: the images and `docker-compose.yml`, built and run for real."""
