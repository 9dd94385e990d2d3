-- The states of a lease. Needs: now.

local function text(number) return string.format('%.0f', number) end

-- Another program may have written a value that is not a number, or one that no command accepts.
local function whole(field)
  local number = tonumber(field)
  return number and number > -EXACT and number < EXACT and math.floor(number) or nil
end

local function memory(ttl) return math.max(whole(ttl) or 0, MEMORY_MS) end

local function ended(kind) return kind == 'released' or kind == 'broken' end

-- Whether a hash has a present lease. One without an end, or with an end that is not a number, was
-- damaged by another program. It counts as present until an operator breaks it.
local function lives(owner, till, kind)
  return owner and owner ~= '' and not ended(kind) and (whole(till) or math.huge) > now
end

-- How a lease that is not present ended.
local function end_of(kind)
  return ended(kind) and kind or kind == 'cooling' and 'released' or 'expired'
end

-- How the lease of an earlier owner ended.
local function end_before(past, owner)
  local _, found = string.find(past or '', ';' .. owner .. ':', 1, true)
  local letter = found and string.match(past, '^([rbe]);', found + 1)
  return letter and ({r = 'released', b = 'broken', e = 'expired'})[letter]
end
