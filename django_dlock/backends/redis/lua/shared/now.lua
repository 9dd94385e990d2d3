-- The server's time in µs and in ms, as text, and in ms as a number. Texts are cut and joined if
-- possible, because formatting a number takes as long as a command.
local time = redis.call('TIME')
local micros = time[1] .. string.sub('000000' .. time[2], -6)
local moment = string.sub(micros, 1, -4)
local now = tonumber(moment)
