// The gateways of one deployment: which one is in use, and when it counts as silent.
/** A gateway that has not answered a stream for this long is left for another, milliseconds. */
const SILENT_MS = 2000;
/** Maximum of that time. It doubles with each change that brought no video, for slow networks. */
const LONGEST_SILENT_MS = 16_000;
export class Gateways {
    /** `urls`: addresses of gateways that serve the same sessions, at least one. */
    constructor(urls) {
        if (!urls.length)
            throw new TypeError("baseUrl: at least one address is needed");
        this.#urls = urls.map(checked);
    }
    #urls;
    #used = 0;
    /** The address in use, with a slash at its end. */
    get current() {
        return this.#urls[this.#used];
    }
    get count() {
        return this.#urls.length;
    }
    /** Add addresses that a gateway has named. A key that is sent encrypted stays encrypted. */
    learn(urls) {
        const { protocol } = new URL(this.#urls[0]);
        for (const url of urls) {
            if (!URL.canParse(url) || new URL(url).protocol !== protocol)
                continue;
            const found = checked(url);
            if (!this.#urls.includes(found))
                this.#urls.push(found);
        }
    }
    /** Use the address after `url`, unless another one is in use already. */
    leave(url) {
        if (url === this.current)
            this.#used = (this.#used + 1) % this.#urls.length;
    }
}
/** Decides when a gateway counts as silent, and when to ping it. Methods take the time in milliseconds. */
export class SilenceWatch {
    limitMs = SILENT_MS;
    #askedAt = null;
    /** The gateway was asked for something: a connection, or the answer to a ping. */
    asked(now) {
        this.#askedAt = now;
    }
    /** A message of the gateway came. `isVideo`: it was a chunk. */
    heard(isVideo = false) {
        this.#askedAt = null;
        if (isVideo)
            this.limitMs = SILENT_MS;
    }
    get wantsPing() {
        return this.#askedAt === null;
    }
    isSilent(now) {
        return this.#askedAt !== null && now - this.#askedAt >= this.limitMs;
    }
    /** The gateway was left. The next one gets more time, in case the network is slow. */
    left() {
        this.#askedAt = null;
        this.limitMs = Math.min(LONGEST_SILENT_MS, 2 * this.limitMs);
    }
}
function checked(baseUrl) {
    const url = new URL(baseUrl);
    if (!/^https?:$/.test(url.protocol))
        throw new TypeError(`baseUrl: ${baseUrl} must begin with http:// or https://`);
    url.search = url.hash = "";
    url.pathname = url.pathname.replace(/\/*$/, "/");
    return url.href;
}
