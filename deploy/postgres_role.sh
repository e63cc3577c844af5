#!/bin/sh
# Makes the role that the state store logs in as: it owns the database and may nothing beyond it.
#
# The watchdog's probe runs this once in the life of a container: a new volume, a volume of an earlier version, in
# which the state store was superuser, and another password in .env all end up the same. It may be repeated.
set -eu
export PGPASSWORD="$POSTGRES_PASSWORD"
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
     -v role=turboserve_services -v password="$POSTGRES_SERVICES_PASSWORD" -v database="$POSTGRES_DB" <<'SQL'
select format('create role %I', :'role') where not exists (select from pg_roles where rolname = :'role') \gexec
alter role :"role" with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls password :'password';
alter database :"database" owner to :"role";
revoke connect on database postgres from public;
revoke connect on database template1 from public;
-- What the superuser made before there was this role. The sequence of a column goes with its table.
select format('alter table %s owner to %I', c.oid::regclass, :'role')
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'public' and c.relkind in ('r', 'p', 'v', 'm')
  and pg_get_userbyid(c.relowner) = current_user \gexec
SQL
# The superuser logs in over the socket inside the container alone.
hba="${PGDATA:-/var/lib/postgresql/data}/pg_hba.conf"
grep -q "^host all $POSTGRES_USER all reject" "$hba" || sed -i "1i host all $POSTGRES_USER all reject" "$hba"
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" -c 'select pg_reload_conf()' >/dev/null
