// What the API answers, with the names of its members. A newer gateway may add members and values.
export {};
