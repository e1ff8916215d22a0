"use strict";
// The file's data: decoded when it is asked for, the last chunks kept. Everything reaches the page as text.

const byId = (name) => document.getElementById(name);

function make(tag, names, text) {
  const element = document.createElement(tag);
  if (names) element.className = names;
  if (text !== undefined) element.textContent = text;
  return element;
}

async function decoded(name) {
  const raw = atob(byId(name).textContent);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const chunks = new Map(); // number -> promise of its rows, the latest used last
const KEPT_CHUNKS = 64;

function chunkOf(number) {
  const found = chunks.get(number) || decoded(`rows-${number}`);
  chunks.delete(number);
  chunks.set(number, found);
  if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
  return found;
}

async function rowOf(n) {
  return (await chunkOf(Math.floor(n / index.chunk)))[n % index.chunk];
}
