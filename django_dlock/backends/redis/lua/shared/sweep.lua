-- Needs: index; read, clean.

-- Cleans; returns the answer and the names to check next, at most ``most``.
local function swept(answer, first, most)
  local checked, size = #KEYS - first + 1, 20
  if clean(first) * 4 > checked then size = math.min(checked * 4, most) end
  return {answer, unpack(read('ZRANDMEMBER', index, size) or {})}
end
