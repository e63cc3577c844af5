// One session: its prompts, its video, its end.
import { Recording } from "./recording.js";
import { VideoStream } from "./video_stream.js";
/** One session of a client. */
export class Session {
    client;
    id;
    /** As the gateway last described the session; null: not read yet. */
    info;
    /** `info`: as the gateway last described the session; null: not read yet. */
    constructor(client, id, info = null) {
        this.client = client;
        this.id = id;
        this.info = info;
    }
    /** Address of the video as one MP4 file, for other players. It has no key. */
    get videoUrl() {
        return this.client.url(`${this.#path}/stream.mp4`).href;
    }
    /** Read the session. */
    refresh() {
        return this.#described("GET", this.#path);
    }
    /**
     * Change the prompt from the next chunk on. `prompt.applied` with the receipt's `prompt_id` follows, or
     * `prompt.superseded`. `dropBuffer`: viewers discard the video that they have not shown, and skip to the
     * first chunk that shows the prompt.
     */
    prompt(prompt, { dropBuffer = false } = {}) {
        const body = { prompt, drop_buffer: dropBuffer };
        return this.client.request("POST", `${this.#path}/prompts`, { body, idempotent: false });
    }
    /**
     * Set one of the model's controls (`Client.models`) from the next chunk on. `control.applied` with the receipt's
     * `control_id` follows, or `control.superseded`. Null: the model's own. `dropBuffer`: as for `prompt`.
     */
    setControl(name, value, { dropBuffer = false } = {}) {
        const body = { name, value, drop_buffer: dropBuffer };
        return this.client.request("POST", `${this.#path}/controls`, { body, idempotent: false });
    }
    /** Change limits of the session from the next chunk on. What is left out stays; null sets the default. */
    change({ quality, maxLeadS }) {
        return this.#described("PATCH", this.#path, { body: { quality, max_lead_s: maxLeadS } });
    }
    /** Stop generation, free the slot, keep the state. A repeat gets the same answer. */
    pause() {
        return this.#described("POST", `${this.#path}/pause`);
    }
    /** Continue where the session stopped. A repeat gets the same answer. */
    resume() {
        return this.#described("POST", `${this.#path}/resume`);
    }
    /** End the session for good. A repeat gets the same answer. */
    end() {
        return this.#described("DELETE", this.#path);
    }
    /** Migrate the session to `worker`. Empty: the scheduler chooses. The video goes on. */
    migrate(worker = "") {
        return this.client.request("POST", `${this.#path}/migrate`, { body: worker ? { worker } : {} });
    }
    /** List what the scheduler decided about the session, oldest first. */
    async decisions() {
        return (await this.client.request("GET", `${this.#path}/decisions`)).decisions;
    }
    /**
     * Create a ticket for the session's streams. It opens streams for about a minute: `?ticket=` in the address of
     * the WebSocket, `stream.mp4` or `events`. `role`: `viewer` or `controller`; by default what the key allows.
     */
    ticket({ role } = {}) {
        return this.client.request("POST", `${this.#path}/tickets`, { body: { role } });
    }
    /**
     * Create a link to the session. Its `token` is the `key` of a client that may use this session only.
     * `expiresAt`: a Date; by default after the gateway's lifetime of links.
     */
    share({ role = "viewer", expiresAt, label, } = {}) {
        const body = { role, label, expires_at: expiresAt?.toISOString() };
        return this.client.request("POST", `${this.#path}/links`, { body, idempotent: false });
    }
    /** List the session's links that have not expired, newest first, without their tokens. */
    async links() {
        return (await this.client.request("GET", `${this.#path}/links`)).links;
    }
    /** Revoke a link. The streams that it has opened end within a few seconds. A repeat gets the same answer. */
    revokeLink(link) {
        return this.client.request("DELETE", `${this.#path}/links/${encodeURIComponent(link)}`);
    }
    /** Record the session from the next chunk on. A session that is recorded already returns its recording. */
    startRecording() {
        return this.#recorded("POST");
    }
    /** Stop recording. The session goes on, and what was recorded stays. A repeat gets the same recording. */
    stopRecording() {
        return this.#recorded("DELETE");
    }
    /** List the session's recordings, newest first. */
    recordings() {
        return this.client.recordings({ session: this.id });
    }
    /** Return the session's chunks, events and skips, to be read with `for await`. See `VideoStream`. */
    watch(options = {}) {
        return new VideoStream(this, options);
    }
    get #path() {
        return `v1/sessions/${encodeURIComponent(this.id)}`;
    }
    async #recorded(method) {
        const info = await this.client.request(method, `${this.#path}/recording`);
        return new Recording(this.client, info.id, info);
    }
    async #described(method, path, options) {
        const info = await this.client.request(method, path, options);
        // Answers overtake each other.
        if (!(info.newest_event < this.info?.newest_event))
            this.info = info;
        return info;
    }
}
