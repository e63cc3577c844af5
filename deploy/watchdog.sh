#!/bin/sh
# Runs a server, and ends with another status than 0 when the server hangs or cannot write although its disk has
# room: Docker and podman restart what ends, and not what is unhealthy.
#
#   watchdog.sh DIRECTORY PROBE SERVER [ARGUMENT…]
#
# DIRECTORY  where the server keeps its data; - for none
# PROBE      a shell command that has the server write something. Its status:
#            0 written; 1 the server answers that it cannot; 3 it is full by its own limits, which no restart
#            changes; anything else, and no end within WATCHDOG_ANSWER_S: no answer
set -u

every_s=${WATCHDOG_EVERY_S:-2}
answer_s=${WATCHDOG_ANSWER_S:-4}
# Answers in a row that are missing, and that are failures.
silent_limit=${WATCHDOG_SILENT_LIMIT:-4}
failing_limit=${WATCHDOG_FAILING_LIMIT:-3}
# Until the first success: a server may have much to recover.
start_s=${WATCHDOG_START_S:-600}
room_kib=32768

directory=$1 probe=$2
shift 2

say() { echo "watchdog: $*" >&2; }

has_room() {
    [ "$directory" = - ] && return 0
    free_kib=$(df -Pk "$directory" 2>/dev/null | awk 'NR == 2 {print $4}')
    [ "${free_kib:-$room_kib}" -ge "$room_kib" ]
}

stopping=
forward() {
    stopping=yes
    kill -"$1" "$server" 2>/dev/null
}

end() {
    say "$*: the server is killed"
    kill -KILL "$server" 2>/dev/null
    exit 1
}

"$@" &
server=$!
for signal in TERM INT QUIT; do
    # shellcheck disable=SC2064
    trap "forward $signal" "$signal"
done

silent=0 failing=0 waited=0 ready= alarm=
while kill -0 "$server" 2>/dev/null; do
    # In the background, so that a signal is not kept waiting.
    sleep "$every_s" &
    wait $!
    [ -n "$stopping" ] && break
    timeout -s KILL "$answer_s" sh -c "$probe" >/dev/null &
    wait $!
    status=$?
    [ -n "$stopping" ] && break
    case $status in
    0)
        [ -n "$alarm" ] && say "the server writes again"
        silent=0 failing=0 ready=yes alarm=
        continue ;;
    1) silent=0 failing=$((failing + 1)) ;;
    3)
        [ -z "$alarm" ] && say "ALARM: the server is full by its own limits"
        silent=0 failing=0 alarm=yes
        continue ;;
    *) failing=0 silent=$((silent + 1)) ;;
    esac
    if [ -z "$ready" ]; then
        waited=$((waited + every_s))
        [ "$waited" -ge "$start_s" ] && end "not ready after $start_s s"
        continue
    fi
    if [ "$silent" -ge "$silent_limit" ]; then
        end "no answer $silent times in a row"
    elif [ "$failing" -gt 0 ] && ! has_room; then
        # A restart does not make room.
        [ -z "$alarm" ] && say "ALARM: the server cannot write, its disk is full"
        failing=0 alarm=yes
    elif [ "$failing" -ge "$failing_limit" ]; then
        end "it failed $failing times in a row"
    fi
done

# A signal ends `wait` before the server has ended.
while kill -0 "$server" 2>/dev/null; do
    wait "$server"
done
wait "$server"
