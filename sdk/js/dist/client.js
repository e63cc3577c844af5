// The client of one deployment.
import { Gateways } from "./gateways.js";
import { Recording } from "./recording.js";
import { Session } from "./session.js";
import { request } from "./transport.js";
export const DEFAULT_URL = "http://127.0.0.1:8080";
/** A client of one deployment. */
export class Client {
    key;
    attempts;
    timeoutS;
    /** @internal */
    gateways;
    /**
     * `baseUrl`: address of the gateway. A path in front of `/v1` is kept. Or addresses of gateways that serve the
     * same sessions: the client leaves one that is silent. A stream learns further addresses from the gateway.
     */
    constructor(baseUrl = DEFAULT_URL, { key = "", attempts = 5, timeoutS = 30 } = {}) {
        this.gateways = new Gateways(Array.isArray(baseUrl) ? baseUrl : [baseUrl]);
        if (!(attempts >= 1))
            throw new RangeError(`attempts: ${attempts} must be at least 1`);
        this.key = key;
        this.attempts = attempts;
        this.timeoutS = timeoutS;
    }
    /** Address of the gateway in use, with a slash at its end. */
    get baseUrl() {
        return this.gateways.current;
    }
    /** Create a session. It lasts until `Session.end`. A repeated request creates one session. */
    async create(prompt, { maxLeadS, ...more } = {}) {
        const body = { prompt, max_lead_s: maxLeadS, ...more };
        const info = await this.request("POST", "v1/sessions", { body, idempotent: false });
        return new Session(this, info.id, info);
    }
    /** Return the session of this id, without asking the gateway. */
    session(id) {
        return new Session(this, id);
    }
    /** List the caller's sessions, newest first. `phases`: only these. Empty: all. */
    async *sessions({ phases = [], pageSize = 100 } = {}) {
        let after;
        do {
            const query = { phase: phases, limit: pageSize, after };
            const page = await this.request("GET", "v1/sessions", { query });
            for (const info of page.sessions)
                yield new Session(this, info.id, info);
            after = page.next;
        } while (after != null);
    }
    /** Return the recording of this id, without asking the gateway. */
    recording(id) {
        return new Recording(this, id);
    }
    /** List the caller's recordings, newest first. `session`: only those of this session. */
    async *recordings({ session, pageSize = 100 } = {}) {
        let after;
        do {
            const page = await this.request("GET", "v1/recordings", { query: { session, limit: pageSize, after } });
            for (const info of page.recordings)
                yield new Recording(this, info.id, info);
            after = page.next;
        } while (after != null);
    }
    /** List the models that ready workers serve, with what each understands. */
    async models() {
        return (await this.request("GET", "v1/models")).models;
    }
    /** List the workers. */
    async workers() {
        return (await this.request("GET", "v1/workers")).workers;
    }
    /**
     * Send a request of the API that has no method of its own.
     *
     * `path`: without a slash in front, such as `v1/pools`.
     */
    request(method, path, { body, query = {}, idempotent = true } = {}) {
        const { key, attempts, timeoutS, gateways } = this;
        const options = { method, key, body, idempotent, attempts, timeoutS, gateways };
        return request(() => this.url(path, query), options);
    }
    /** Return the address of a path. Members of `query` that are null or undefined are left out. */
    url(path, query = {}) {
        const url = new URL(path, this.baseUrl);
        for (const [name, value] of Object.entries(query)) {
            for (const one of Array.isArray(value) ? value : [value])
                if (one != null)
                    url.searchParams.append(name, one);
        }
        return url;
    }
}
