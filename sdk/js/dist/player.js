// The custom element `<turboserve-player>`: plays one session, and reports what the viewer sees as events.
import { Client, DEFAULT_URL } from "./client.js";
import { LivePlayback } from "./live_playback.js";
import { Playback } from "./playback.js";
import { FIRST_PROMPT, PlayedSession } from "./played_session.js";
export { FIRST_PROMPT };
const SRC = /^(.*\/)v1\/sessions\/([A-Za-z0-9_-]+)(?:\/stream(?:\.mp4)?)?$/;
const STYLE = `
  :where(turboserve-player) { display: block; }
  :where(turboserve-player > video) { display: block; width: 100%; height: 100%; }
`;
/**
 * Attributes: `base-url` and `session`, or `src` with the address of a session; `transport`. Property `key`: the
 * API key.
 * A `<video>` inside is used; without one, the element makes one.
 */
export class TurboServePlayer extends HTMLElement {
    static observedAttributes = ["base-url", "session", "src", "transport"];
    #client = null;
    #key = "";
    #playbacks = null;
    #played = null;
    #isScheduled = false;
    #isStalled = false;
    connectedCallback() {
        if (!document.adoptedStyleSheets.includes(sheet))
            document.adoptedStyleSheets.push(sheet);
        this.#playbacks ??= this.#makePlaybacks(this.querySelector("video") ?? this.#makeVideo());
        this.#schedule();
    }
    disconnectedCallback() {
        // Not for an element that moves inside the document.
        queueMicrotask(() => this.isConnected || this.#leave());
    }
    attributeChangedCallback(name, before, now) {
        if (before === now)
            return;
        if (name === "transport") {
            this.#played?.use(this.transport);
            return;
        }
        if (name !== "session" && now !== null)
            this.#client = null;
        this.#schedule();
    }
    /** API key. It stays out of the document. A key that is set after a refusal opens the session again. */
    get key() {
        return this.#client?.key ?? this.#key;
    }
    set key(key) {
        this.#key = key;
        if (this.#client)
            this.#client.key = key;
        if (!this.#played)
            this.#schedule();
    }
    /** The client that sends the element's requests. A page that has one of its own may set it. */
    get client() {
        const base = this.#src?.[1] ?? this.getAttribute("base-url") ?? DEFAULT_URL;
        this.#client ??= new Client(new URL(base, document.baseURI), { key: this.#key });
        return this.#client;
    }
    set client(client) {
        this.#client = client;
    }
    /**
     * How video comes: `websocket`, with a buffer, or `webrtc`, with hardly any. If WebRTC fails, a WebSocket takes
     * its place, and the event `transport` says so.
     */
    get transport() {
        return this.getAttribute("transport") === "webrtc" ? "webrtc" : "websocket";
    }
    set transport(transport) {
        this.setAttribute("transport", transport);
    }
    /** The session that is open; null: none. */
    get session() {
        return this.#played?.session ?? null;
    }
    /** What the gateway last reported: `phase`, `activity`, `epoch`, `worker`, `target`. Null: no session. */
    get state() {
        return this.#played?.state ?? null;
    }
    /** The newest chunk's header; null: none came yet. */
    get chunk() {
        return this.#played?.chunk ?? null;
    }
    /** Whether the stream is connected. */
    get connected() {
        return this.#played?.connected ?? false;
    }
    /** How the session ended; null: it has not. */
    get ended() {
        return this.#played?.ended ?? null;
    }
    /** The `<video>`; null before the element is in a document. */
    get video() {
        return this.querySelector("video");
    }
    /** Whether this browser can play the video. */
    get supported() {
        return this.#playback?.supported ?? false;
    }
    /** Whether the first frame was shown. */
    get started() {
        return this.#playback?.started ?? false;
    }
    /** Whether playback waits for video. */
    get stalled() {
        return this.#isStalled;
    }
    /** Media time on screen, seconds. */
    get playhead() {
        return this.#playback?.playhead ?? 0;
    }
    /** Media that can be played without another chunk, seconds. */
    get buffered() {
        return this.#playback?.ahead ?? 0;
    }
    /** Create a session and play it. `options`: see `Client.create`. */
    async create(prompt, options = {}) {
        const createdAtMs = performance.now();
        const session = await this.client.create(prompt, options);
        this.open(session.id, { createdAtMs });
        return session;
    }
    /** Play a session. `createdAtMs`: `performance.now()` when the user asked for it, if it is a new one. */
    open(id, { createdAtMs = null } = {}) {
        if (!this.#playbacks)
            throw new TypeError("put the element into the document first");
        this.#leave();
        const session = this.client.session(id);
        if (this.#src && this.#src[2] !== id)
            this.removeAttribute("src");
        this.setAttribute("session", id);
        // This is the session that the attributes name now.
        this.#isScheduled = false;
        const emit = (type, detail) => this.#report(type, detail);
        this.#played = new PlayedSession(session, this.#playbacks, emit, createdAtMs, this.transport);
    }
    /** Leave the session. It is suspended after a while without a viewer; `end` ends it. */
    close() {
        this.#leave();
        for (const one of Object.values(this.#playbacks ?? {}))
            one.release();
        this.#playback?.reset();
        this.removeAttribute("session");
        this.removeAttribute("src");
        this.#isScheduled = false;
    }
    /** Change the prompt. `promptapplied` and `promptshown` follow. `options`: see `Session.prompt`. */
    async prompt(prompt, options = {}) {
        return this.#current.prompt(prompt, options);
    }
    /** Set a control. `controlapplied` and `controlshown` follow. `options`: see `Session.setControl`. */
    async setControl(name, value, options = {}) {
        return this.#current.setControl(name, value, options);
    }
    /** Pause the session for all its viewers. */
    async pause() {
        return this.#current.pause();
    }
    /** Continue a paused session. */
    async resume() {
        return this.#current.resume();
    }
    /** End the session for good. */
    async end() {
        return this.#current.session.end();
    }
    get #current() {
        if (!this.#played)
            throw new TypeError("the player has no session: call `open` or `create` first");
        return this.#played;
    }
    get #playback() {
        return this.#played?.playback ?? this.#playbacks?.websocket ?? null;
    }
    get #src() {
        return SRC.exec(this.getAttribute("src") ?? "");
    }
    #makePlaybacks(video) {
        const changed = () => this.#changed();
        const firstFrame = () => this.#played?.firstFrame();
        const failed = (error) => this.#played && this.#report("error", { error, isFinal: true });
        return {
            websocket: new Playback(video, changed, firstFrame, failed),
            webrtc: new LivePlayback(video, changed, firstFrame),
        };
    }
    #makeVideo() {
        const video = document.createElement("video");
        video.muted = video.playsInline = true;
        this.append(video);
        return video;
    }
    // Attributes that change together open one stream.
    #schedule() {
        if (this.#isScheduled || !this.#playbacks)
            return;
        this.#isScheduled = true;
        queueMicrotask(() => {
            if (!this.#isScheduled)
                return;
            this.#isScheduled = false;
            if (!this.isConnected)
                return;
            const id = this.#src?.[2] ?? this.getAttribute("session");
            if (id)
                this.open(id);
            else if (this.#played)
                this.close();
        });
    }
    #leave() {
        this.#played?.close();
        this.#played = null;
        this.#isStalled = false;
    }
    #report(type, detail) {
        if (type === "error" && detail.isFinal)
            this.#leave();
        this.dispatchEvent(new CustomEvent(type, { detail }));
    }
    #changed() {
        if (!this.#playback)
            return;
        const { stalled } = this.#playback;
        if (stalled !== this.#isStalled) {
            this.#isStalled = stalled;
            this.#report("stall", { stalled });
        }
        this.#report("playback", { started: this.started, stalled });
    }
}
// A page's Content-Security-Policy may forbid inline styles.
const sheet = new CSSStyleSheet();
sheet.replaceSync(STYLE);
if (!customElements.get("turboserve-player"))
    customElements.define("turboserve-player", TurboServePlayer);
