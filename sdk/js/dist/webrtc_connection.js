// WebRTC of one session (WHEP): a video track, and the messages of the WebSocket over a data channel.
import { GatewayUnreachableError, ProtocolError } from "./errors.js";
import { SilenceWatch } from "./gateways.js";
import { StreamMessages } from "./stream_messages.js";
import { answered } from "./transport.js";
const SDP = "application/sdp";
/** Time for each step until the gateway's first message, seconds. */
const CONNECT_S = 5;
/** Time in which candidates are gathered if there are STUN or TURN servers, seconds. */
const GATHER_S = 2;
const AGAIN_MS = 250;
/** Minimum time for which a lost connection is tried, if there are several gateways: once at each in any case. */
const ELSEWHERE_MS = 10_000;
/** A gateway is asked for an answer this often, if there is another one. */
const PING_MS = 500;
const ICE_SERVER = /<([^>]+)>((?:\s*;\s*[a-z-]+="[^"]*")*)/g;
const PARAMETER = /([a-z-]+)="([^"]*)"/g;
export class WebRtcConnection {
    session;
    /**
     * Connects at once. A lost connection is made again once; if there are several gateways, it is tried at each of
     * them. `eventsAfter`: see `StreamConnection`.
     */
    constructor(session, on, { eventsAfter } = {}) {
        this.session = session;
        this.#on = on;
        this.#messages = new StreamMessages(session, on, eventsAfter);
        // Handlers are not called before the caller has this connection.
        queueMicrotask(() => this.#closed || this.#open());
    }
    #on;
    #messages;
    #pc = null;
    #channel = null;
    #timer = 0;
    #silence = new SilenceWatch();
    #checking = 0;
    #greeted = false;
    #closed = false;
    #gateway = "";
    /** When the last connection was lost, until there is another one. */
    #lostAt = null;
    /** Number of times in succession that it was tried since, and failed. */
    #failed = 0;
    close() {
        this.#closed = true;
        this.#drop();
    }
    /** Send a message, if the connection is open. */
    send(message) {
        if (this.#channel?.readyState === "open")
            this.#channel.send(JSON.stringify(message));
    }
    /** The gateway knows the playhead: it has sent each frame at its time. */
    report() { }
    async #open() {
        this.#greeted = false;
        let pc = null;
        try {
            if (!globalThis.RTCPeerConnection)
                throw new ProtocolError("this browser has no WebRTC");
            this.#gateway = this.session.client.baseUrl;
            const iceServers = await this.#ask("OPTIONS", {}, (answer) => serversOf(answer.headers.get("Link")));
            if (this.#closed)
                return;
            pc = this.#pc = new RTCPeerConnection({ iceServers });
            this.#prepare(pc);
            await pc.setLocalDescription();
            if (iceServers.length)
                await gathered(pc);
            const body = { body: pc.localDescription.sdp, contentType: SDP };
            const sdp = await this.#ask("POST", body, (answer) => answer.text());
            if (this.#closed || pc !== this.#pc)
                return;
            await pc.setRemoteDescription({ type: "answer", sdp });
            this.#timer = setTimeout(() => this.#fail(new GatewayUnreachableError("no answer over WebRTC")), CONNECT_S * 1000);
        }
        catch (error) {
            if (!this.#closed && pc === this.#pc)
                this.#fail(error);
        }
    }
    #prepare(pc) {
        pc.addTransceiver("video", { direction: "recvonly" });
        const channel = (this.#channel = pc.createDataChannel("messages"));
        pc.ontrack = ({ track }) => this.#isCurrent(pc) && this.#on.track?.(track);
        channel.onmessage = ({ data }) => {
            if (!this.#isCurrent(pc))
                return;
            const message = JSON.parse(data);
            this.#silence.heard(message.type === "chunk");
            this.#message(message);
        };
        channel.onclose = () => this.#isCurrent(pc) && this.#lost();
        pc.onconnectionstatechange = () => {
            if (this.#isCurrent(pc) && ["failed", "disconnected", "closed"].includes(pc.connectionState))
                this.#lost();
        };
    }
    #isCurrent(pc) {
        return !this.#closed && pc === this.#pc;
    }
    // Leaves a gateway that does not answer. With one gateway, only the end of the connection tells.
    #check() {
        if (this.session.client.gateways.count < 2)
            return;
        if (this.#silence.isSilent(Date.now())) {
            this.#silence.left();
            this.#lost();
        }
        else if (this.#silence.wantsPing) {
            this.#silence.asked(Date.now());
            this.send({ type: "ping" });
        }
    }
    #ask(method, options, read) {
        const { client, id } = this.session;
        const query = method === "POST" ? { events_after: this.#messages.eventsAfter } : {};
        const address = () => client.url(`v1/sessions/${encodeURIComponent(id)}/whep`, query);
        const { key, gateways } = client;
        return answered(address, { method, key, gateways, attempts: 1, timeoutS: CONNECT_S, ...options, read });
    }
    #message(message) {
        switch (message.type) {
            case "hello":
                this.#greet(message);
                break;
            case "init":
            case "chunk":
            case "skip":
                this.#on[message.type]?.(message, null);
                break;
            case "error":
                this.#messages.problem(message, this.session.client.key);
                break;
            case "end":
                // What was sent last is shown, so the connection stays until the caller closes it.
                this.#closed = true;
                clearInterval(this.#checking);
                this.#on.end?.(message);
                break;
            default:
                this.#messages.event(message);
        }
    }
    #greet(message) {
        const error = this.#messages.versionError(message);
        if (error)
            return this.#fail(error);
        clearTimeout(this.#timer);
        this.#greeted = true;
        this.#lostAt = null;
        this.#checking = setInterval(() => this.#check(), PING_MS);
        this.#messages.greet(message);
    }
    #lost() {
        if (!this.#greeted)
            return this.#fail(new GatewayUnreachableError("WebRTC does not connect"));
        this.#lostAt = Date.now();
        this.#failed = 0;
        this.#again();
    }
    #again() {
        this.#drop();
        this.session.client.gateways.leave(this.#gateway);
        this.#on.lost?.(AGAIN_MS);
        if (!this.#closed)
            this.#timer = setTimeout(() => this.#open(), AGAIN_MS);
    }
    #fail(error) {
        const { count } = this.session.client.gateways;
        this.#failed += 1;
        // Where each gateway takes long to fail, the time may be over before the last one was tried.
        const mayTry = this.#lostAt !== null && (this.#failed < count || Date.now() - this.#lostAt < ELSEWHERE_MS);
        const isAway = error instanceof GatewayUnreachableError || error.status >= 500;
        if (mayTry && isAway && count > 1)
            return this.#again();
        this.close();
        this.#on.unavailable?.(error);
    }
    #drop() {
        clearTimeout(this.#timer);
        clearInterval(this.#checking);
        const pc = this.#pc;
        this.#pc = this.#channel = null;
        pc?.close();
    }
}
// The header `Link` with STUN and TURN servers, as draft-ietf-wish-whep has it.
function serversOf(header) {
    return [...(header ?? "").matchAll(ICE_SERVER)]
        .map(([, urls, rest]) => ({
        urls,
        ...Object.fromEntries([...rest.matchAll(PARAMETER)].map(([, name, value]) => [name, value])),
    }))
        .filter(({ rel }) => rel === "ice-server")
        .map(({ urls, username, credential }) => (username ? { urls, username, credential } : { urls }));
}
function gathered(pc) {
    return new Promise((resolve) => {
        const look = () => pc.iceGatheringState === "complete" && resolve();
        pc.addEventListener("icegatheringstatechange", look);
        setTimeout(resolve, GATHER_S * 1000);
        look();
    });
}
