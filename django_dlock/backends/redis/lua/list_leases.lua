-- Reads the leases of names, for operators, and removes free names from the index.
--
-- KEYS:
--   index
--   lock...: of each name
--   queue...: the waiters of each name, if they are counted
-- ARGV:
--   base: prefix of all keys
--   contains: text to search for, or ''
--   quoted: the same, escaped as in JSON
--   task: beginning of the task, or ''
--   task_quoted: the same, escaped as in JSON
--   fact...: fields of a lease's hash; those that begin with ``@`` are computed
-- Answer:
--   a list: now ms; JSON [[name, until, kind, fact...], ...] of those that are held; JSON
--   [process, ...]. Rows refer to a process by number. Waiters are [[number of the process, how
--   many], ...]. JSON is written and read much faster than a reply of many parts.
--
-- A key without a TTL is listed even if its lease is over, because it would stay for ever.

local index = KEYS[1]
local base, contains, quoted, task, task_quoted = unpack(ARGV, 1, 5)

--- include read
--- include now
--- include lease

local facts, fields, column_of = #ARGV - 5, {}, {}
for i = 1, facts do
  local fact = ARGV[5 + i]
  column_of[fact] = 3 + i
  if string.sub(fact, 1, 1) ~= '@' then fields[i] = fact end
end

local call, try, rows, procs, number_of = redis.call, redis.pcall, {}, {}, {}

-- A huge value would take the time and the memory of everybody who reads the page.
local function brief(value)
  return #value <= LONGEST and value or string.sub(value, 1, LONGEST)
end

local proc_at, endless_at, waiting_at = column_of.proc, column_of['@endless'], column_of['@waiting']
local count = waiting_at and (#KEYS - 1) / 2 or #KEYS - 1

-- So that the id of a process is sent, and the process asked for, only once.
local function number(process)
  if not number_of[process] then
    procs[#procs + 1] = brief(process)
    -- As text, because formatting a number for each lease is slower than finding the process.
    number_of[process] = tostring(#procs)
  end
  return number_of[process]
end

local function is_endless(lock) return call('PTTL', lock) == -1 end

local function is_held(lock, owner, till, kind)
  return lives(owner, till, kind)
    or owner and owner ~= '' and not ended(kind) and is_endless(lock)
end

local function waiting(queue)
  local counts, found = {}, {}
  for _, waiter in ipairs(read('ZRANGE', queue, 0, -1) or {}) do
    local of = number(string.match(waiter, '^.-\n.-\n.-\n(.-)\n') or '')
    counts[of] = (counts[of] or 0) + 1
  end
  for of, waiters in pairs(counts) do found[#found + 1] = {of, waiters} end
  return found
end

-- The number of the key of each row.
local key_of = {}

-- Adds a row, or removes a free name from the index.
local function collect(at, name)
  local lock = KEYS[at]
  local l = try('HMGET', lock, 'owner', 'until', 'kind', unpack(fields))
  if l.err then
    -- Another program has put something else there. It stays in the index, so that it is seen.
    l = read('HMGET', lock, 'owner') or {name, '', 'WRONG_TYPE'}
    for i = 4, 3 + facts do l[i] = false end
    if endless_at then l[endless_at] = true end
    rows[#rows + 1], key_of[#rows + 1] = l, at
    return
  end
  local owner, till, kind = l[1], l[2], l[3]
  -- For most names this is enough, and a function call is slow.
  local ends = kind == 'held' and owner and owner ~= '' and tonumber(till)
  local plain = ends and ends > now
  if not plain and not is_held(lock, owner, till, kind) then
    read('ZREM', index, name)
    return
  end
  for i = 2, 3 + #fields do
    local value = l[i]
    if value and #value > LONGEST then l[i] = brief(value) end
  end
  l[1] = name
  if proc_at then l[proc_at] = l[proc_at] and (number_of[l[proc_at]] or number(l[proc_at])) end
  if endless_at then l[endless_at] = is_endless(lock) end
  rows[#rows + 1], key_of[#rows + 1] = l, at
end

local function metadata_with(lock, part)
  local meta = read('HGET', lock, 'meta') or ''
  -- Searching the whole text first is faster than decoding it.
  if not string.find(meta, part, 1, true) then return {} end
  local is_json, metadata = pcall(cjson.decode, meta)
  return is_json and type(metadata) == 'table' and metadata or {}
end

local function is_in_metadata(lock)
  local metadata = metadata_with(lock, quoted)
  for _, key in ipairs({SEARCHED}) do
    local fact = metadata[key]
    if type(fact) == 'string' and string.find(fact, contains, 1, true) then return true end
  end
  return false
end

local function is_of_task(lock)
  local fact = metadata_with(lock, task_quoted).task_name
  return type(fact) == 'string' and string.sub(fact, 1, #task) == task
end

local all = contains == '' and task == ''
for at = 2, 1 + count do
  local name = string.sub(KEYS[at], #base + #'LOCKS' + 1)
  if all or (contains == '' or string.find(name, contains, 1, true) or is_in_metadata(KEYS[at]))
    and (task == '' or is_of_task(KEYS[at])) then
    collect(at, name)
  end
end

for first = 1, waiting_at and #rows or 0, 50 do
  local last, queues = math.min(first + 49, #rows), {}
  for i = first, last do queues[#queues + 1] = KEYS[key_of[i] + count] end
  -- Most names have no waiters, which one call finds out for many of them.
  local anybody = call('EXISTS', unpack(queues)) > 0
  for i = first, last do
    rows[i][waiting_at] = anybody and waiting(KEYS[key_of[i] + count]) or {}
  end
end

return {text(now), cjson.encode(rows), cjson.encode(procs)}
