// The JavaScript kernel: runs cells that it gets on standard input, a socket, and keeps their variables between them.
// Messages are four bytes of length, then JSON. It uses nothing but what node ships.
'use strict';

const fs = require('node:fs');
const net = require('node:net');
const util = require('node:util');
const vm = require('node:vm');
const { createRequire } = require('node:module');

const TEXT_LETTERS = 256 << 10;
const FORMAT_LETTERS = 4 << 20;
const JSON_DEPTH = 100;
const RESULTS = 200;
const DISPLAY = Symbol.for('Jupyter.display');
const TYPES = {
  'text/plain': 'text', 'text/html': 'html', 'text/markdown': 'markdown', 'image/svg+xml': 'svg',
  'image/png': 'png', 'image/jpeg': 'jpeg', 'application/json': 'json', 'text/latex': 'latex',
};

// Node's own parser and its way of letting cells await, when it was started with --expose-internals.
const internals = (() => {
  try {
    return {
      parse: require('internal/deps/acorn/acorn/dist/acorn').parse,
      await: require('internal/repl/await').processTopLevelAwait,
    };
  } catch {
    return null;
  }
})();

const channel = new net.Socket({ fd: 0, readable: true, writable: true });
const write = fs.writeSync;
let cell = 0;
let shown = 0;
let interrupt = null;

function send(message) {
  // Half a pair of UTF-16 has no place in a message.
  const whole = (_, value) => (typeof value === 'string' ? value.toWellFormed?.() ?? value : value);
  const body = Buffer.from(JSON.stringify(message, whole));
  const head = Buffer.alloc(4);
  head.writeUInt32BE(body.length);
  channel.write(Buffer.concat([head, body]));
}

// Cells may run again, so what they declare at the top becomes `var`, which may be declared twice.
function redeclarable(source) {
  if (internals === null) return source;
  let tree;
  try {
    tree = internals.parse(source, { ecmaVersion: 'latest', allowAwaitOutsideFunction: true, allowHashBang: true });
  } catch {
    return source; // the script's own error says more
  }
  let changed = source;
  for (const node of tree.body.reverse()) {
    if (node.type === 'VariableDeclaration' && node.kind !== 'var') {
      changed = changed.slice(0, node.start) + 'var' + changed.slice(node.start + node.kind.length);
    } else if (node.type === 'ClassDeclaration') {
      changed = `${changed.slice(0, node.start)}var ${node.id.name} = ${changed.slice(node.start)}`;
    }
  }
  return changed;
}

function compile(source, filename) {
  const changed = redeclarable(source);
  const awaited = /\bawait\b/.test(source) && internals !== null ? internals.await(changed) : null;
  const options = { filename, importModuleDynamically: vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER };
  return { script: new vm.Script(awaited ?? changed, options), awaits: awaited !== null };
}

async function run(source, filename) {
  const { script, awaits } = compile(source, filename);
  const interrupted = new Promise((_, reject) => { interrupt = reject; });
  interrupted.catch(() => {});
  const value = script.runInThisContext({ breakOnSigint: true });
  if (!awaits) return value;
  const settled = await Promise.race([value, interrupted]);
  // Node's rewriting returns the last value in an object, so that a promise is not awaited twice.
  return settled !== null && typeof settled === 'object' && 'value' in settled ? settled.value : settled;
}

function describe(value) {
  const notes = [];
  let found = {};
  if (value !== null && typeof value === 'object' && typeof value[DISPLAY] === 'function') {
    found = bundle(value[DISPLAY](), notes);
  } else if (value !== null && typeof value === 'object' && !util.types.isProxy(value)) {
    found = json(value, notes);
  }
  found.text = cut(String(found.text ?? util.inspect(value, { depth: 4, maxArrayLength: 200 })), notes);
  return { ...found, notes };
}

function bundle(media, notes) {
  const found = {};
  for (const [type, data] of Object.entries(media ?? {})) {
    const name = TYPES[type];
    if (name === undefined) continue;
    if (name === 'json') Object.assign(found, json(data, notes));
    else if (String(data).length > FORMAT_LETTERS) notes.push(`${name}: left out, it is too long`);
    else found[name] = String(data);
  }
  return found;
}

function json(value, notes) {
  let text;
  try {
    text = JSON.stringify(value);
  } catch {
    return {}; // circular, or with a bigint: the text shows it
  }
  if (text === undefined) return {};
  if (text.length > FORMAT_LETTERS) {
    notes.push(`json: left out, ${text.length} letters are too many`);
    return {};
  }
  if (!shallow(value, JSON_DEPTH)) {
    notes.push(`json: left out, it is more than ${JSON_DEPTH} levels deep`);
    return {};
  }
  return { json: JSON.parse(text) };
}

function shallow(value, levels) {
  if (value === null || typeof value !== 'object') return true;
  return levels > 0 && Object.values(value).every((inner) => shallow(inner, levels - 1));
}

function cut(text, notes) {
  if (text.length <= TEXT_LETTERS) return text;
  notes.push(`text: the first ${TEXT_LETTERS} of ${text.length} letters`);
  return text.slice(0, TEXT_LETTERS);
}

function publish(formats, main) {
  shown += 1;
  if (shown > RESULTS + 1) return;
  const result = shown > RESULTS ? { text: '', notes: [`only the first ${RESULTS} results of a cell are kept`] } : formats;
  send({ type: 'result', cell, result: { ...result, main } });
}

function explain(error) {
  if (!(error instanceof Error) && !util.types.isNativeError(error)) {
    const text = util.inspect(error);
    return { name: typeof error, message: text.slice(0, TEXT_LETTERS), traceback: `Uncaught ${text}`.slice(0, TEXT_LETTERS) };
  }
  const lines = String(error.stack ?? error).split('\n');
  const own = lines.filter((line) => !/^\s+at /.test(line) || (line.includes('cell ') && !line.includes(__filename)));
  return { name: String(error.name), message: String(error.message).slice(0, TEXT_LETTERS), traceback: own.join('\n').slice(0, TEXT_LETTERS) };
}

async function answer(request) {
  cell = request.cell;
  shown = 0;
  delete process.env.SKEP_IDEMPOTENCY_KEY;
  if (request.key) process.env.SKEP_IDEMPOTENCY_KEY = request.key;
  let error = null;
  let interrupted = false;
  try {
    const value = await run(request.code, `cell ${cell}`);
    if (value !== undefined) publish(describe(value), true);
  } catch (raised) {
    interrupted = raised?.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED';
    error = interrupted ? { name: 'Interrupted', message: 'the cell was interrupted', traceback: '' } : explain(raised);
  }
  interrupt = null;
  send({ type: 'done', cell, error, interrupted });
}

// Output is written at once and in order: a cell's end must not overtake it.
for (const [stream, fd] of [[process.stdout, 1], [process.stderr, 2]]) {
  stream.write = (data, encoding, done) => {
    const bytes = typeof data === 'string' ? Buffer.from(data, typeof encoding === 'string' ? encoding : 'utf8') : data;
    for (let at = 0; at < bytes.length;) {
      try {
        at += write(fd, bytes, at);
      } catch (error) {
        if (error.code !== 'EAGAIN') throw error;
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
      }
    }
    const then = typeof encoding === 'function' ? encoding : done;
    if (then) process.nextTick(then);
    return true;
  };
}

process.on('SIGINT', () => {
  const error = new Error('the cell was interrupted');
  error.code = 'ERR_SCRIPT_EXECUTION_INTERRUPTED';
  interrupt?.(error);
});
// What a timer or an unwatched promise raises belongs to no cell; it is said and the variables live on.
process.on('uncaughtException', (error) => process.stderr.write(`${util.inspect(error)}\n`));
process.on('unhandledRejection', (error) => process.stderr.write(`unhandled rejection: ${util.inspect(error)}\n`));

globalThis.require = createRequire(`${process.cwd()}/`);
globalThis.display = (value) => publish(describe(value), false);

let received = Buffer.alloc(0);
let turn = Promise.resolve();
channel.on('data', (piece) => {
  received = Buffer.concat([received, piece]);
  while (received.length >= 4 && received.length >= 4 + received.readUInt32BE(0)) {
    const end = 4 + received.readUInt32BE(0);
    const request = JSON.parse(received.subarray(4, end).toString());
    received = received.subarray(end);
    turn = turn.then(() => answer(request));
  }
});
channel.on('end', () => process.exit(0));
channel.on('error', () => process.exit(0));
send({ type: 'ready', version: process.versions.node, missing: [] });
