// One session on a screen: its stream, its playback, and what of it the viewer sees.
import { StreamConnection } from "./connection.js";
import { ShownPrompts } from "./shown_prompts.js";
import { WebRtcConnection } from "./webrtc_connection.js";
/** What `promptId` is in `promptshown` for the prompt that the session was created with. */
export const FIRST_PROMPT = "first";
const ENDED = new Set(["terminated", "failed"]);
const NO_STATE = { phase: null, activity: null, epoch: 0, worker: null, target: null, newestEvent: 0 };
export class PlayedSession {
    session;
    state = NO_STATE;
    chunk = null;
    connected = false;
    ended = null;
    transport = null;
    #playbacks;
    #playback;
    #emit;
    #connection = null;
    #eventsAfter = 0;
    #shown = new ShownPrompts((shown) => this.#emit("promptshown", shown));
    #shownControls = new ShownPrompts(({ index, prompt: { name, value }, promptId, seconds }) => {
        this.#emit("controlshown", { index, name, value, controlId: promptId, seconds });
    });
    #quality = "";
    #timer = 0;
    #frame = 0;
    #closed = false;
    #isPausing = false;
    /**
     * `createdAtMs`: when the user asked for this new session, or null. `transport`: if WebRTC fails, it is
     * `websocket`.
     */
    constructor(session, playbacks, emit, createdAtMs, transport) {
        this.session = session;
        this.#playbacks = playbacks;
        this.#emit = emit;
        if (createdAtMs !== null)
            this.#shown.sent(FIRST_PROMPT, createdAtMs);
        this.use(transport);
        this.#look();
    }
    /** The playback in use. */
    get playback() {
        return this.#playback;
    }
    /** Continue over another transport, at the session's playhead. */
    use(transport) {
        if (this.#closed || this.ended || transport === this.transport)
            return;
        const wanted = this.#playback?.wanted ?? true;
        this.#connection?.close();
        clearInterval(this.#timer);
        for (const one of Object.values(this.#playbacks))
            one.release();
        this.transport = transport;
        this.#playback = this.#playbacks[transport];
        this.#playback.reset();
        if (wanted)
            this.#playback.play();
        else
            this.#playback.pause();
        const options = { eventsAfter: this.#eventsAfter };
        this.#connection =
            transport === "webrtc"
                ? new WebRtcConnection(this.session, this.#handlers(), options)
                : new StreamConnection(this.session, this.#handlers(), { ...options, skipLost: true });
        this.#emit("transport", { transport });
    }
    close() {
        this.#closed = true;
        this.#emit = () => { };
        this.#connection.close();
        clearInterval(this.#timer);
        cancelAnimationFrame(this.#frame);
    }
    /** Playback shows its first frame. */
    firstFrame() {
        this.#connection.send({ type: "first_frame" });
    }
    async prompt(prompt, options) {
        const sentAtMs = performance.now();
        const receipt = await this.session.prompt(prompt, options);
        this.#shown.sent(receipt.prompt_id, sentAtMs);
        return receipt;
    }
    async setControl(name, value, options) {
        const sentAtMs = performance.now();
        const receipt = await this.session.setControl(name, value, options);
        this.#shownControls.sent(receipt.control_id, sentAtMs);
        return receipt;
    }
    async pause() {
        this.#playback.pause();
        this.#isPausing = true;
        try {
            return this.#answered(await this.session.pause());
        }
        finally {
            this.#isPausing = false;
            // It was refused, or the session was resumed meanwhile.
            if (!this.#closed && this.state.activity === "watching")
                this.#playback.play();
        }
    }
    async resume() {
        return this.#answered(await this.session.resume());
    }
    #handlers() {
        return {
            hello: (message) => this.#greeted(message),
            init: (message, data) => {
                this.#playback.init(message, data);
                this.#emit("format", message);
            },
            skip: (message) => {
                this.#playback.skip(message.start_s);
                this.#emit("skip", message);
            },
            chunk: (message, data) => this.#received(message, data),
            track: (track) => this.#playback.track(track),
            unavailable: () => this.use("websocket"),
            event: (message, isNew) => {
                this.#eventsAfter = message.sequence;
                if (message.type === "prompt.applied") {
                    this.#shown.applied(message.chunk_index, message.prompt, message.prompt_id);
                    this.#emit("promptapplied", message);
                }
                if (message.type === "control.applied") {
                    const { chunk_index, name, value = null, control_id } = message;
                    this.#shownControls.applied(chunk_index, { name: name, value }, control_id);
                    this.#emit("controlapplied", message);
                }
                this.#emit("sessionevent", { event: message, isNew });
                if (isNew)
                    this.#learn(message, message.sequence);
            },
            end: (message) => {
                this.#playback.finish();
                this.connected = true;
                this.ended = message;
                clearInterval(this.#timer);
                this.state = { ...this.state, phase: message.phase };
                this.#emit("end", message);
            },
            problem: (error) => this.#emit("error", { error, isFinal: false }),
            lost: (waitMs) => {
                this.connected = false;
                this.#emit("reconnecting", { waitMs });
            },
            gone: (error) => this.#emit("error", { error, isFinal: true }),
        };
    }
    #greeted(message) {
        this.connected = true;
        // Of an ended session, a viewer may want to see the same place again.
        if (ENDED.has(message.phase) && this.transport === "webrtc")
            return this.use("websocket");
        if ((this.#connection.lastIndex ?? null) === null)
            this.#playback.beginAt(message.start_s);
        if (message.control_seq === 0)
            this.#shown.applied(0, message.prompt, FIRST_PROMPT);
        clearInterval(this.#timer);
        this.#timer = setInterval(() => {
            this.#connection.report(this.#playback.playhead, this.#playback.ahead);
        }, message.report_interval_s * 1000);
        this.#emit("hello", message);
        this.#learn(message, message.newest_event);
    }
    #received(message, data) {
        this.chunk = message;
        this.#playback.chunk(message, data);
        for (const each of [this.#shown, this.#shownControls])
            each.chunk(message.index, message.start_s);
        this.#emit("chunk", message);
        const { tier = null, slack_s = null, credit_s = null, fidelity = null } = message;
        const quality = JSON.stringify([tier, fidelity]);
        if (quality === this.#quality)
            return;
        this.#quality = quality;
        this.#emit("quality", { chunk: message.index, tier, slack_s, credit_s, fidelity });
    }
    #answered(info) {
        this.#learn(info, info.newest_event);
        return info;
    }
    // `newestEvent`: the newest event that the news reflects. Answers and events overtake each other.
    // An earlier gateway's answers have no number, and are believed.
    #learn({ phase, activity, epoch, worker, target }, newestEvent = this.state.newestEvent) {
        // A late answer: the playback is another session's by now.
        if (this.#closed || newestEvent < this.state.newestEvent)
            return;
        this.state = { phase, activity, epoch, worker: worker ?? null, target: target ?? null, newestEvent };
        if (activity === "paused")
            this.#playback.pause();
        // An event may still come before the pause.
        else if (!this.#playback.wanted && !this.#isPausing)
            this.#playback.play();
        this.#emit("statechange", this.state);
    }
    #look() {
        if (this.#closed)
            return;
        if (this.#playback.started) {
            for (const each of [this.#shown, this.#shownControls])
                each.look(this.#playback.playhead);
        }
        this.#frame = requestAnimationFrame(() => this.#look());
    }
}
