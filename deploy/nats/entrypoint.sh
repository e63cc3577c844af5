#!/bin/sh
# Starts the broker under its watchdog: entrypoint.sh [ARGUMENT OF NATS-SERVER…]
#
# Two of the broker's users are for the watchdog alone, so their passwords are new at every start.
set -eu

password() { echo "p$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"; }

NATS_HEALTH_PASSWORD=$(password)
NATS_WATCHDOG_PASSWORD=$(password)
export NATS_HEALTH_PASSWORD NATS_WATCHDOG_PASSWORD
here=$(dirname "$0")
exec sh "$here/watchdog.sh" /data "exec python3 -I -S $here/probe.py" nats-server "$@"
