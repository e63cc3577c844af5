// One recording of a session: what is stored of it, and how to play, download and delete it.

import { answered } from "./transport.js";
import type { Client } from "./client.js";
import type { RecordingInfo } from "./models.js";

/** One recording of a client. */
export class Recording {
  readonly client: Client;
  readonly id: string;
  /** As the gateway last described the recording; null: not read yet. */
  info: RecordingInfo | null;

  /** `info`: as the gateway last described the recording; null: not read yet. */
  constructor(client: Client, id: string, info: RecordingInfo | null = null) {
    this.client = client;
    this.id = id;
    this.info = info;
  }

  /** Address of the video as one MP4 file, for other players. It has no key. */
  get videoUrl(): string {
    return this.client.url(`${this.#path}/video.mp4`).href;
  }

  /** Read what is stored so far. */
  async refresh(): Promise<RecordingInfo> {
    this.info = await this.client.request("GET", this.#path);
    return this.info!;
  }

  /** Delete the recording. A running one stops. */
  delete(): Promise<null> {
    return this.client.request("DELETE", this.#path);
  }

  /** Return the video as one MP4 file. `part`: which of the recording's `parts`, from 1. */
  download({ part = 1 }: { part?: number } = {}): Promise<Blob> {
    return this.#get("video.mp4", (answer) => answer.blob(), { query: { part }, timeoutS: Infinity });
  }

  /** Return the first frame as a JPEG file. */
  poster(): Promise<Blob> {
    return this.#get("poster.jpg", (answer) => answer.blob());
  }

  /** Return the HLS media playlist as text. */
  playlist(): Promise<string> {
    return this.#get("playlist.m3u8", (answer) => answer.text());
  }

  /** Return a file that the playlist names, such as `segments/0.m4s`. */
  item(name: string): Promise<ArrayBuffer> {
    return this.#get(name, (answer) => answer.arrayBuffer());
  }

  get #path(): string {
    return `v1/recordings/${encodeURIComponent(this.id)}`;
  }

  #get<Value>(
    item: string,
    read: (answer: Response) => Promise<Value>,
    { query = {}, timeoutS = this.client.timeoutS }: { query?: Record<string, unknown>; timeoutS?: number } = {},
  ): Promise<Value> {
    const { key, attempts, gateways } = this.client;
    const address = () => this.client.url(`${this.#path}/${item}`, query);
    return answered(address, { method: "GET", key, attempts, gateways, timeoutS, read });
  }
}
