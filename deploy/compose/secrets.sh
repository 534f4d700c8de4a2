#!/bin/sh
# Makes the secrets of docker-compose.yml, each a file in deploy/compose/secrets/; those that are
# there stay as they are. The folder is for its owner alone. The files can be read by all, since the
# containers, which see single files of it, run as another user.
set -eu
umask 077
mkdir -p "$(dirname "$0")/secrets"
cd "$(dirname "$0")/secrets"

secret() { # secret NAME VALUE
    [ -e "$1" ] || printf '%s' "$2" >"$1"
    chmod 644 "$1"
}
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# Of the Hugging Face hub; empty is none.
secret hf_token ""
secret offbeat_api_key "$(random)"
secret offbeat_worker_token "$(random)"
secret offbeat_s3_secret_access_key "$(random)"
secret offbeat_vllm_api_key "$(random)"
secret postgres_password "$(random)"
secret redis_password "$(random)"
database="postgresql+psycopg://offbeat:$(cat postgres_password)@postgres:5432/offbeat"
secret offbeat_orchestrator_database_url "$database"
secret offbeat_weight_proxy_database_url "$database"
secret offbeat_redis_url "redis://:$(cat redis_password)@redis:6379/0"
