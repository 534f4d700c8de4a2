#!/bin/sh
# Puts back what backup.sh wrote; what the database and the bucket hold now is lost:
#
#   deploy/compose/restore.sh FOLDER
set -eu
folder="$(cd "$1" && pwd)"
cd "$(dirname "$0")/../.."

docker compose stop
docker compose up --detach --wait postgres minio
docker compose run --rm -T bucket
docker compose exec -T postgres dropdb --username offbeat --force --if-exists offbeat
docker compose exec -T postgres createdb --username offbeat offbeat
docker compose exec -T postgres pg_restore --username offbeat --dbname offbeat --exit-on-error \
    <"$folder/offbeat.dump"
docker compose run --rm --no-deps -T --volume "$folder:/backup:ro" rclone \
    sync /backup/bucket "store:${OFFBEAT_S3_BUCKET:-offbeat}"
docker compose up --detach
