"""Every subject that a broker user might try, and the subjects that each service needs.

The needs are written out by hand. The permissions are generated, and a generator that grants more must fail
here. A new endpoint, topic or log needs a line here.
"""

from __future__ import annotations

from turboserve import subjects

USERS = (*subjects.SERVICES, subjects.ADMIN)
ID = "x1"
"""Stands for any session, worker or model."""

RECORDING_VERBS = ("delete", "get", "list", "start", "stop")
RECORDER_VERBS = ("forget", "orders", "report")
AUDIT_VERBS = ("list", "note")
LINK_VERBS = ("create", "list", "revoke", "signing")
HISTORY_VERBS = ("cost", "decisions", "get", "lanes", "migrations", "waiting")
WEBHOOK_VERBS = (*("change", "create", "delete", "deliveries", "get", "list", "redeliver", "rotate", "test"),)
SENDER_VERBS = ("report", "take")
KEY_VERBS = ("change", "create", "get", "list", "revoke", "used", "valid")

NEEDS: dict[str, dict[str, set[str]]] = {
    "gateway": {
        "publish": {
            "$JS.API.STREAM.INFO.CHUNKS",
            "$JS.API.STREAM.INFO.EVENTS",
            "$JS.API.DIRECT.GET.CHUNKS",
            "$JS.API.DIRECT.GET.EVENTS",
            "leave.x1",
            "playhead.x1",
            "scheduler.session.migrate.from.gateway",
            "state.cost.correct.from.gateway",
            "state.cost.get.from.gateway",
            *(f"state.history.{verb}.from.gateway" for verb in HISTORY_VERBS),
            *(f"state.key.{verb}.from.gateway" for verb in KEY_VERBS),
            *(f"state.link.{verb}.from.gateway" for verb in LINK_VERBS),
            *(f"state.audit.{verb}.from.gateway" for verb in AUDIT_VERBS),
            "state.pool.order.from.gateway",
            "recorder.read.from.gateway",
            *(f"state.recording.{verb}.from.gateway" for verb in RECORDING_VERBS),
            *(f"state.webhook.{verb}.from.gateway" for verb in WEBHOOK_VERBS),
            "webhooks.secret.from.gateway",
            "state.session.change.from.gateway",
            "state.session.control.from.gateway",
            "state.session.create.from.gateway",
            "state.session.decisions.from.gateway",
            "state.session.end.from.gateway",
            "state.session.get.from.gateway",
            "state.session.list.from.gateway",
            "state.session.pause.from.gateway",
            "state.session.prompt.from.gateway",
            "state.session.resume.from.gateway",
            "state.usage.list.from.gateway",
            "state.worker.list.from.gateway",
        },
        "subscribe": {
            "_INBOX_gateway.x1",
            "live.canary.CHUNKS",
            "live.canary.EVENTS",
            "live.chunk.x1.x1",
            "live.event.x1",
            "live.own.x1",
            "key.x1",
            "leave.x1",
            "link.x1",
            "pool.x1",
        },
    },
    "scheduler": {
        "publish": {
            "$JS.API.STREAM.INFO.EVENTS",
            "$JS.API.DIRECT.GET.EVENTS",
            # The scheduler's answers to requests; the broker chooses the token.
            "_R_.x1",
            "feedback.x1",
            "state.leader.campaign.from.scheduler",
            "state.leader.get.from.scheduler",
            "state.leader.renew.from.scheduler",
            "state.leader.resign.from.scheduler",
            "state.session.get.from.scheduler",
            "state.session.list.from.scheduler",
            "state.session.migration.abandon.from.scheduler",
            "state.session.migration.begin.from.scheduler",
            "state.session.migration.commit.from.scheduler",
            "state.session.note.from.scheduler",
            "state.session.place.from.scheduler",
            "state.session.release.from.scheduler",
            "state.session.suspend-idle.from.scheduler",
            "state.worker.gone.from.scheduler",
            "state.worker.list.from.scheduler",
        },
        "subscribe": {
            "_INBOX_scheduler.x1",
            "live.canary.EVENTS",
            "live.event.x1",
            "live.worker-event.x1",
            "load.x1.x1",
            "playhead.x1",
            "pool.x1",
            *(f"scheduler.session.migrate.from.{user}" for user in (*USERS, ID)),
        },
    },
    "autoscaler": {
        "publish": {
            "pool.x1",
            "state.leader.campaign.from.autoscaler",
            "state.leader.get.from.autoscaler",
            "state.leader.renew.from.autoscaler",
            "state.leader.resign.from.autoscaler",
            "state.pool.report.from.autoscaler",
            "state.worker.drain.from.autoscaler",
            "state.worker.gone.from.autoscaler",
            "state.worker.list.from.autoscaler",
        },
        "subscribe": {
            "_INBOX_autoscaler.x1",
            "feedback.x1",
            "live.canary.EVENTS",
            "live.event.x1",
            "load.x1.x1",
        },
    },
    "worker": {
        "publish": {
            "$JS.API.DIRECT.GET.CHUNKS",
            "chunk.x1.x1",
            "latents.x1.x1",
            "load.x1.x1",
            "state.latents.get.from.worker",
            "state.session.fail.from.worker",
            "state.worker.renew.from.worker",
            "state.worker.weights.from.worker",
        },
        "subscribe": {
            "_INBOX_worker.x1",
            "assign.x1.x1",
            "live.canary.CHUNKS",
            "playhead.x1",
            "weights.x1.x1",
        },
    },
    "recorder": {
        "publish": {
            "$JS.API.STREAM.INFO.CHUNKS",
            "$JS.API.DIRECT.GET.CHUNKS",
            # The recorder's answers to requests; the broker chooses the token.
            "_R_.x1",
            "state.session.get.from.recorder",
            *(f"state.recording.{verb}.from.recorder" for verb in RECORDER_VERBS),
        },
        "subscribe": {
            "_INBOX_recorder.x1",
            "live.canary.CHUNKS",
            "live.chunk.x1.x1",
            "live.own.x1",
            *(f"recorder.read.from.{user}" for user in (*USERS, ID)),
        },
    },
    "webhooks": {
        "publish": {
            # The service's answers to requests; the broker chooses the token.
            "_R_.x1",
            *(f"state.webhook.{verb}.from.webhooks" for verb in SENDER_VERBS),
        },
        "subscribe": {
            "_INBOX_webhooks.x1",
            *(f"webhooks.secret.from.{user}" for user in (*USERS, ID)),
        },
    },
    "state-store": {
        "publish": {
            "$JS.API.STREAM.INFO.CHUNKS",
            "$JS.API.STREAM.INFO.EVENTS",
            "$JS.API.STREAM.CREATE.CHUNKS",
            "$JS.API.STREAM.CREATE.EVENTS",
            "$JS.API.STREAM.UPDATE.CHUNKS",
            "$JS.API.STREAM.UPDATE.EVENTS",
            "$JS.API.STREAM.PURGE.CHUNKS",
            "$JS.API.STREAM.PURGE.EVENTS",
            "$JS.API.INFO",
            "$JS.API.CONSUMER.CREATE.CHUNKS.x1",
            "$JS.API.CONSUMER.INFO.CHUNKS.x1",
            "$JS.API.CONSUMER.MSG.NEXT.CHUNKS.x1",
            "$JS.API.DIRECT.GET.CHUNKS",
            "$JS.API.DIRECT.GET.EVENTS",
            "_INBOX_admin.x1",
            "_R_.x1",
            "assign.x1.x1",
            "canary.CHUNKS",
            "canary.EVENTS",
            "event.x1",
            "key.x1",
            "link.x1",
            "own.x1",
            "weights.x1.x1",
            "worker-event.x1",
        },
        "subscribe": {
            "_INBOX_state_store.x1",
            "latents.x1.x1",
            "live.canary.CHUNKS",
            "live.canary.EVENTS",
            "playhead.x1",
            *(
                f"{name}.from.{user}"
                for user in (*USERS, ID)
                for name in (
                    "state.cost.correct",
                    "state.cost.get",
                    *(f"state.history.{verb}" for verb in HISTORY_VERBS),
                    *(f"state.key.{verb}" for verb in KEY_VERBS),
                    *(f"state.link.{verb}" for verb in LINK_VERBS),
                    *(f"state.audit.{verb}" for verb in AUDIT_VERBS),
                    *(f"state.recording.{verb}" for verb in (*RECORDING_VERBS, *RECORDER_VERBS)),
                    *(f"state.webhook.{verb}" for verb in (*WEBHOOK_VERBS, *SENDER_VERBS)),
                    "state.latents.get",
                    "state.leader.campaign",
                    "state.leader.get",
                    "state.leader.renew",
                    "state.leader.resign",
                    "state.pool.order",
                    "state.pool.report",
                    "state.session.change",
                    "state.session.control",
                    "state.session.create",
                    "state.session.decisions",
                    "state.session.end",
                    "state.session.fail",
                    "state.session.get",
                    "state.session.list",
                    "state.session.migration.abandon",
                    "state.session.migration.begin",
                    "state.session.migration.commit",
                    "state.session.note",
                    "state.session.pause",
                    "state.session.place",
                    "state.session.prompt",
                    "state.session.release",
                    "state.session.resume",
                    "state.session.suspend-idle",
                    "state.usage.list",
                    "state.worker.drain",
                    "state.worker.gone",
                    "state.worker.list",
                    "state.worker.renew",
                    "state.worker.weights",
                )
            ),
        },
    },
}

_API = (
    *("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "META.RESCUE", "SERVER.REMOVE"),
    *("SERVER.EVACUATE", "SERVER.PEER.REMOVE", "STREAM.TEMPLATE.NAMES", "STREAM.TEMPLATE.CREATE.x1"),
    *(
        "STREAM.TEMPLATE.INFO.x1",
        "STREAM.TEMPLATE.DELETE.x1",
        "ACCOUNT.PURGE.x1",
        "ACCOUNT.PURGE.STATE_STORE",
    ),
)
_API_OF_STREAM = (
    *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.INFO", "STREAM.DELETE", "STREAM.PURGE", "STREAM.SNAPSHOT"),
    *("STREAM.RESTORE", "STREAM.MSG.DELETE", "STREAM.MSG.GET", "STREAM.PEER.REMOVE", "STREAM.PEER.EVACUATE"),
    *("STREAM.CANCEL_MOVE", "STREAM.LEADER.STEPDOWN", "DIRECT.GET", "CONSUMER.CREATE", "CONSUMER.NAMES"),
    *("CONSUMER.LIST", "ACCOUNT.STREAM.MOVE.STATE_STORE", "ACCOUNT.STREAM.CANCEL_MOVE.STATE_STORE"),
)
_API_OF_CONSUMER = (
    *("CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.INFO", "CONSUMER.DELETE", "CONSUMER.PAUSE"),
    *("CONSUMER.RESET", "CONSUMER.UNPIN", "CONSUMER.MSG.NEXT", "CONSUMER.LEADER.STEPDOWN"),
)
_SERVER = (
    *(
        "$SYS.REQ.SERVER.PING",
        "$SYS.REQ.SERVER.PING.VARZ",
        "$SYS.REQ.SERVER.PING.CONNZ",
        "$SYS.REQ.USER.INFO",
    ),
    *("$SYS.REQ.SERVER.PING.KICK", "$SYS.REQ.SERVER.x1.RELOAD", "$SYS.REQ.ACCOUNT.PING.CONNZ"),
    *("$SYS.REQ.ACCOUNT.PING.STATZ", "$SYS.REQ.ACCOUNT.STATE_STORE.CONNZ", "$SYS.REQ.CLAIMS.UPDATE"),
    *("$SYS.ACCOUNT.STATE_STORE.CONNECT", "$SYS.DEBUG.SUBSCRIBERS", "$SYS.JSC.STREAM.ASSIGNMENT.RESULT"),
    *("$JSC.SI.x1.CHUNKS", "$JSC.R.x1", "$JSC.ACK.x1", "$NRG.P.x1", "$NRG.V.x1", "$NRG.AE.x1", "$GNR.x1"),
    *("$JS.ACK.CHUNKS.x1.1.1.1.1.1", "$JS.ACK.EVENTS.x1.1.1.1.1.1", "$JS.ACK.hub.x.CHUNKS.x1.1.1.1.1.1.t"),
    *("$JS.FC.CHUNKS.x1.r", "$JS.FC.hub.x.CHUNKS.x1.r", "$JS.SNAPSHOT.ACK.CHUNKS.x1"),
    *("$JS.SNAPSHOT.RESTORE.CHUNKS.x1", "$JS.EVENT.ADVISORY.API", "$JS.EVENT.ADVISORY.STREAM.DELETED.CHUNKS"),
    *("$JS.EVENT.METRIC.CONSUMER.ACK.CHUNKS.x1", "$JS.M.x1", "$JS.S.x1", "$JS.hub.API.STREAM.DELETE.CHUNKS"),
    *(
        "$KV.x1.x1",
        "$O.x1.C.x1",
        "$MQTT.sub.x1",
        "$MQTT.msgs.x1",
        "$SRV.PING",
        "_INBOX.x1",
        "_INBOX_.x1",
        "x1",
    ),
)
WILDCARDS = (
    *(">", "*", "*.*", "*.>", "*.*.*", "*.*.*.from.>", "state.>", "state.*.*.from.*", "scheduler.>"),
    *(
        "scheduler.*.*.from.*",
        "own.*",
        "own.>",
        "chunk.>",
        "chunk.*.*",
        "event.>",
        "worker-event.>",
        "live.>",
        "live.*.*",
        "live.*.*.*",
        "live.chunk.*",
        "live.chunk.>",
    ),
    *(
        "live.own.*",
        "live.canary.>",
        "canary.>",
        "load.>",
        "assign.>",
        "playhead.>",
        "latents.>",
        "pool.>",
        "key.>",
        "weights.>",
    ),
    *(
        "feedback.>",
        "$JS.>",
        "$JS.API.>",
        "$JS.API.*.*.CHUNKS",
        "$JS.ACK.>",
        "$JS.EVENT.>",
        "$SYS.>",
        "$JSC.>",
    ),
    *("_INBOX.>", "_R_.>", *(f"{subjects.inbox_prefix(user)}.{every}" for user in USERS for every in "*>")),
)
WILDCARDS_NEEDED = {
    # A user that may subscribe to `pool.*` may subscribe to `pool.>`, which is the same while no subject is
    # longer.
    "gateway": {"_INBOX_gateway.*", "_INBOX_gateway.>", "key.>", "live.own.*", "pool.>"},
    "scheduler": {"_INBOX_scheduler.*", "_INBOX_scheduler.>", "playhead.>", "pool.>"},
    "autoscaler": {"_INBOX_autoscaler.*", "_INBOX_autoscaler.>", "feedback.>"},
    "worker": {"_INBOX_worker.*", "_INBOX_worker.>", "playhead.>"},
    "recorder": {"_INBOX_recorder.*", "_INBOX_recorder.>", "live.own.*"},
    "webhooks": {"_INBOX_webhooks.*", "_INBOX_webhooks.>"},
    "state-store": {"_INBOX_state_store.*", "_INBOX_state_store.>", "playhead.>"},
}


def every_api_subject() -> list[str]:
    """Return every subject of the JetStream API, for both streams and one that does not exist."""
    names = [f"$JS.API.{verb}" for verb in _API]
    for stream in (subjects.CHUNKS, subjects.EVENTS, "STOLEN"):
        names += [f"$JS.API.{verb}.{stream}" for verb in _API_OF_STREAM]
        names += [f"$JS.API.{verb}.{stream}.{ID}" for verb in _API_OF_CONSUMER]
        for log in subjects.LOGS:
            names.append(f"$JS.API.CONSUMER.CREATE.{stream}.{ID}.{log.by(ID, ID)}")
            names.append(f"$JS.API.DIRECT.GET.{stream}.{log.by(ID, ID)}")
    return names


def every_application_subject() -> list[str]:
    """Return every endpoint for every caller, every topic, log and inbox, and the broker's own subjects."""
    names = []
    for endpoint in subjects.ENDPOINTS:
        names += [endpoint.subject, f"{endpoint.subject}.{ID}"]
        names += [endpoint.request_subject(caller) for caller in (*USERS, ID)]
    names += [topic.of(ID) for topic in subjects.TOPICS]
    for log in subjects.LOGS:
        names += [log.by(ID, ID), f"live.{log.by(ID, ID)}", log.pattern.format(id=ID)]
    names += [f"{subjects.inbox_prefix(user)}.{ID}" for user in USERS]
    return list(dict.fromkeys([*names, f"_R_.{ID}", *_SERVER]))
