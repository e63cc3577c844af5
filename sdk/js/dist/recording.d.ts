import type { Client } from "./client.js";
import type { RecordingInfo } from "./models.js";
/** One recording of a client. */
export declare class Recording {
    #private;
    readonly client: Client;
    readonly id: string;
    /** As the gateway last described the recording; null: not read yet. */
    info: RecordingInfo | null;
    /** `info`: as the gateway last described the recording; null: not read yet. */
    constructor(client: Client, id: string, info?: RecordingInfo | null);
    /** Address of the video as one MP4 file, for other players. It has no key. */
    get videoUrl(): string;
    /** Read what is stored so far. */
    refresh(): Promise<RecordingInfo>;
    /** Delete the recording. A running one stops. */
    delete(): Promise<null>;
    /** Return the video as one MP4 file. `part`: which of the recording's `parts`, from 1. */
    download({ part }?: {
        part?: number;
    }): Promise<Blob>;
    /** Return the first frame as a JPEG file. */
    poster(): Promise<Blob>;
    /** Return the HLS media playlist as text. */
    playlist(): Promise<string>;
    /** Return a file that the playlist names, such as `segments/0.m4s`. */
    item(name: string): Promise<ArrayBuffer>;
}
