#!/bin/sh
# Copies the database and the bucket of docker-compose.yml into a folder, while everything runs:
#
#   deploy/compose/backup.sh FOLDER
#
# Again into the same folder, it copies what is new. The database is first: objects never change, so
# the copy of the bucket, which is later, has all that the database names.
set -eu
mkdir -p "$1"
folder="$(cd "$1" && pwd)"
cd "$(dirname "$0")/../.."

docker compose exec -T postgres pg_dump --username offbeat --format custom offbeat \
    >"$folder/offbeat.dump.partial"
mv "$folder/offbeat.dump.partial" "$folder/offbeat.dump"
docker compose run --rm --no-deps -T --volume "$folder:/backup" rclone \
    sync "store:${OFFBEAT_S3_BUCKET:-offbeat}" /backup/bucket
