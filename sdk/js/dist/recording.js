// One recording of a session: what is stored of it, and how to play, download and delete it.
import { answered } from "./transport.js";
/** One recording of a client. */
export class Recording {
    client;
    id;
    /** As the gateway last described the recording; null: not read yet. */
    info;
    /** `info`: as the gateway last described the recording; null: not read yet. */
    constructor(client, id, info = null) {
        this.client = client;
        this.id = id;
        this.info = info;
    }
    /** Address of the video as one MP4 file, for other players. It has no key. */
    get videoUrl() {
        return this.client.url(`${this.#path}/video.mp4`).href;
    }
    /** Read what is stored so far. */
    async refresh() {
        this.info = await this.client.request("GET", this.#path);
        return this.info;
    }
    /** Delete the recording. A running one stops. */
    delete() {
        return this.client.request("DELETE", this.#path);
    }
    /** Return the video as one MP4 file. `part`: which of the recording's `parts`, from 1. */
    download({ part = 1 } = {}) {
        return this.#get("video.mp4", (answer) => answer.blob(), { query: { part }, timeoutS: Infinity });
    }
    /** Return the first frame as a JPEG file. */
    poster() {
        return this.#get("poster.jpg", (answer) => answer.blob());
    }
    /** Return the HLS media playlist as text. */
    playlist() {
        return this.#get("playlist.m3u8", (answer) => answer.text());
    }
    /** Return a file that the playlist names, such as `segments/0.m4s`. */
    item(name) {
        return this.#get(name, (answer) => answer.arrayBuffer());
    }
    get #path() {
        return `v1/recordings/${encodeURIComponent(this.id)}`;
    }
    #get(item, read, { query = {}, timeoutS = this.client.timeoutS } = {}) {
        const { key, attempts, gateways } = this.client;
        const address = () => this.client.url(`${this.#path}/${item}`, query);
        return answered(address, { method: "GET", key, attempts, gateways, timeoutS, read });
    }
}
