export type Phase = "requested" | "active" | "migrating" | "suspended" | "terminated" | "failed" | (string & {});
export type Activity = "watching" | "paused" | "idle" | "ended" | (string & {});
export type Tier = "urgent" | "normal" | "relaxed" | (string & {});
/** Limits of the quality of a session's chunks, while its worker has too little time. */
export interface Quality {
    /** Least quality of a chunk, where 1 is the best configuration's. Null: the worker's own floor. */
    floor?: number | null;
    /** Whether every chunk is generated at the best quality. */
    pin?: boolean;
}
/** How urgent a session is. */
export interface Playout {
    slack_s: number;
    credit_s: number | null;
    tier: Tier;
}
/** One session, as the gateway last described it. */
export interface SessionInfo {
    id: string;
    phase: Phase;
    activity: Activity;
    model: string;
    /** Width of a frame, pixels. Null: the model's own, see its `sizes`. */
    width: number | null;
    height: number | null;
    /** The newest accepted prompt. */
    prompt: string;
    seed: number;
    metadata: Record<string, string>;
    /** Number of the current ownership. 0: no worker has owned the session yet. */
    epoch: number;
    worker: string | null;
    /** The worker that the session is migrating to. */
    target: string | null;
    next_chunk: number;
    /** The newest accepted values of the model's controls. Those that are not here have the model's own. */
    controls: Record<string, unknown>;
    control_seq: number;
    applied_control_seq: number;
    /** Number of the newest event that this answer reflects: an answer with a lower number is older. */
    newest_event: number;
    playhead_s: number;
    quality: Quality | null;
    max_lead_s: number | null;
    /** The recording that runs, or ran when the session ended. `null`: none. */
    recording: string | null;
    playout: Playout | null;
    reason: string | null;
    created_at: string;
    updated_at: string;
    links: Record<string, string>;
}
/** An accepted prompt. */
export interface Receipt {
    session: string;
    prompt_id: string;
    /** Number of the prompt in its session. Chunks carry the number of their prompt. */
    control_seq: number;
    accepted_at: string;
}
/** An accepted value of a control. */
export interface ControlReceipt {
    session: string;
    control_id: string;
    /** Number of the value among the session's prompts and controls. */
    control_seq: number;
    accepted_at: string;
}
/** A control that a model takes beside a prompt. */
export interface ModelControl {
    name: string;
    description: string;
    /** JSON schema of a value. */
    schema: Record<string, unknown>;
    /** Whether the value is set when a session is created (`controls`), and never again. */
    fixed?: boolean;
}
/** What is stored of one recording. */
export interface RecordingInfo {
    id: string;
    session: string;
    model: string;
    /** The session's prompt when the recording started. */
    prompt: string;
    state: "recording" | "stopping" | "complete" | (string & {});
    from_chunk: number;
    chunks: number;
    /** Number of chunks that the log dropped before they were stored. */
    missing_chunks: number;
    bytes: number;
    duration_s: number;
    /** Number of videos. More than one: the encoder's settings changed. */
    parts: number;
    /** Why the recording stopped, if its user did not stop it. */
    reason: string | null;
    /** Whether the recording ended because its session failed. A gateway of an earlier version does not say. */
    session_failed?: boolean;
    created_at: string;
    updated_at: string;
    completed_at: string | null;
    /** When the recording is deleted. Null: it is not complete, or is kept until deleted. */
    expires_at: string | null;
    links: Record<string, string>;
}
/** What the holder of a link or ticket may do. A `viewer` watches, a `controller` also controls. */
export type Role = "viewer" | "controller" | (string & {});
/** Opens streams of one session for about a minute. */
export interface Ticket {
    ticket: string;
    role: Role;
    expires_at: string;
}
/** A link to one session. */
export interface Link {
    id: string;
    session: string;
    role: Role;
    label: string;
    created_at: string;
    /** Id of the API key that created the link. Null: the gateway needs no keys. */
    created_by: string | null;
    expires_at: string;
    revoked_at: string | null;
}
/** A created link. Only this answer has its token. */
export interface NewLink extends Link {
    token: string;
    /** Path of the page that plays the session. */
    url: string;
    /** Path of the player for frames of other pages. */
    embed_url: string;
}
/** One decision of the scheduler about a session. */
export interface Decision {
    epoch: number;
    worker: string | null;
    kind: string;
    reason: string;
    numbers: Record<string, number>;
    at: string;
}
/** A migration that has begun. */
export interface Migration {
    session: string;
    epoch: number;
    worker: string | null;
    target: string | null;
    /** As in `SessionInfo`. */
    newest_event: number;
}
/** Ready workers of one kind that serve a model at one size. */
export interface ServingKind {
    kind: string;
    workers: number;
    sessions_per_worker: number;
    /** Null: no price is set. */
    price_per_worker_hour: number | null;
    /** Price of a session on a full worker. Null: no price is set. */
    price_per_session_hour: number | null;
    currency: string | null;
}
/** A frame size at which ready workers serve a model. */
export interface ModelSize {
    /** Pixels. Null: not known. */
    width: number | null;
    height: number | null;
    /** Whether sessions of the model that name no size have this one. */
    default: boolean;
    workers: number;
    capacity: number;
    sessions: number;
    kinds: ServingKind[];
}
/** A model that at least one ready worker serves. */
export interface Model {
    id: string;
    default: boolean;
    workers: number;
    capacity: number;
    sessions: number;
    /** What the model understands of a prompt. Null: it reads any text. */
    prompt_guide: object | null;
    controls: ModelControl[];
    /** The frame sizes that a session may ask for, the default first. */
    sizes: ModelSize[];
}
/** One worker of the deployment. */
export interface Worker {
    id: string;
    model: string;
    /** Size of the frames that it generates, pixels. Null: not known. */
    width: number | null;
    height: number | null;
    phase: string;
    capacity: number;
    sessions: number;
    incoming: number;
    device: string;
    host: string;
    reason: string | null;
}
/** The first message of a connection. Members that would be null are left out, as in all messages. */
export interface Hello {
    type: "hello";
    protocol_version: number;
    session: string;
    phase: Phase;
    activity: Activity;
    prompt: string;
    model: string;
    seed: number;
    epoch: number;
    worker?: string;
    target?: string;
    controls: Record<string, unknown>;
    control_seq: number;
    applied_control_seq: number;
    /** Index of the first chunk of the stream. */
    next: number;
    /** Media time of the stream's first frame, seconds. */
    start_s: number;
    events_after: number;
    newest_event: number;
    max_message_bytes: number;
    report_interval_s: number;
    /** What this client may do. A viewer's controls are refused. */
    role: Role;
    /** Addresses of all gateways, which serve the same sessions. Missing: the gateway does not know them. */
    gateways?: string[];
}
/** The format of the chunks that follow. */
export interface Init {
    type: "init";
    /** MIME type with codec, as a `SourceBuffer` takes it. */
    mime: string;
    bytes: number;
    width: number;
    height: number;
    fps: number;
}
/** The configuration of a chunk that is not of the best quality. */
export interface ChunkFidelity {
    steps: number;
    window_chunks: number;
    sparsity: number;
    /** Whether the model's second, faster decoder has decoded it. */
    fast_decoder: boolean;
    /** Measured quality, where 1 is the best configuration's. Left out: not measured. */
    quality?: number;
}
/** A chunk's header. The binary data is one closed fMP4 fragment that starts with a key frame. */
export interface ChunkMessage {
    type: "chunk";
    index: number;
    epoch: number;
    worker: string;
    start_s: number;
    duration_s: number;
    /** Number of the prompt that it was generated under. */
    control_seq: number;
    compute_s: number;
    /** Seconds of video that the viewer had left when it was published. Below 0: the chunk was late. */
    slack_s?: number;
    /** The slack less the time of the next chunk, seconds. */
    credit_s?: number;
    tier?: Tier;
    /** Left out: the best. */
    fidelity?: ChunkFidelity;
    published_at: string;
    /** Over WebRTC: the RTP timestamp of its first frame less that of the first frame of the stream, in 1/90000 s. */
    rtp_time?: number;
    bytes: number;
}
/** The next chunk is the first that shows a prompt with `dropBuffer`: discard all video before it. */
export interface Skip {
    type: "skip";
    index: number;
    start_s: number;
    control_seq: number;
}
/** The last message of a stream: the session has ended, and all its video was sent. */
export interface End {
    type: "end";
    phase: Phase;
    reason?: string;
    /** Index of the last chunk; -1: there was none. */
    last: number;
}
/** One event of a session, with the session right after it, and the members of its type. */
export interface SessionEvent {
    type: `${"session" | "prompt" | "control"}.${string}`;
    /** Number of the event in its session: 1, 2, 3, … */
    sequence: number;
    id: string;
    at: string;
    phase: Phase;
    activity: Activity;
    epoch: number;
    control_seq: number;
    worker?: string;
    target?: string;
    [member: string]: unknown;
}
