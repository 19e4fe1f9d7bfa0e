import type { Diary, Participation } from "./diary.js";
import { Unavailable } from "./errors.js";

const STORE = "participations";

/**
 * Opens the diary of a browser, in IndexedDB. A second tab gets Unavailable while the first one is open.
 * The person can erase the diary with the site's data, and is then unknown here.
 */
export async function browserDiary(name = "riffle-node"): Promise<Diary> {
  const release = await lock(name);
  try {
    await navigator.storage.persist().catch(() => false); // Otherwise the browser may erase the diary to make room.
    const database = await open(name);
    return {
      entries: () => done(database.transaction(STORE).objectStore(STORE).getAll() as IDBRequest<Participation[]>),
      put: (entries) => put(database, entries),
      close: () => {
        database.close();
        release();
        return Promise.resolve();
      },
    };
  } catch (error) {
    release();
    throw error;
  }
}

/** Takes a lock that other tabs see, and that ends with this tab. */
function lock(name: string): Promise<() => void> {
  return new Promise((resolve, reject) => {
    const held = navigator.locks.request(`riffle-node ${name}`, { ifAvailable: true }, (granted) => {
      if (granted === null) throw new Unavailable("This page is open in another tab. Please go on there, or close it.");
      return new Promise<void>((release) => {
        resolve(release);
      });
    });
    held.catch(reject);
  });
}

function open(name: string): Promise<IDBDatabase> {
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "user" });
  return done(request);
}

function put(database: IDBDatabase, entries: readonly Participation[]): Promise<void> {
  const transaction = database.transaction(STORE, "readwrite", { durability: "strict" });
  for (const entry of entries) transaction.objectStore(STORE).put(entry);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => {
      resolve();
    };
    transaction.onabort = () => {
      reject(storageFault(transaction.error));
    };
  });
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => {
      resolve(request.result);
    };
    request.onerror = () => {
      reject(storageFault(request.error));
    };
  });
}

function storageFault(error: DOMException | null): Unavailable {
  return new Unavailable(`This browser does not let the page keep its list of what you took part in: ${error?.message ?? ""}`);
}
