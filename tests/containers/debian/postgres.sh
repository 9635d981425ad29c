#!/bin/sh
# Makes the cluster with its user and database where there is none, then serves.
set -eu
as() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
mkdir -p "$PGDATA" /run/postgresql
chown -R postgres: "$PGDATA" /run/postgresql
cd /
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  install -o postgres -m 600 "$POSTGRES_PASSWORD_FILE" /run/postgresql/password
  as initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile=/run/postgresql/password --auth-host=scram-sha-256 --auth-local=trust
  rm /run/postgresql/password
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  as pg_ctl -D "$PGDATA" -w -o "-c listen_addresses=''" start
  as createdb -U "$POSTGRES_USER" "$POSTGRES_DB"
  as pg_ctl -D "$PGDATA" -w stop
fi
exec setpriv --reuid=postgres --regid=postgres --clear-groups "$@" -c listen_addresses='*'
