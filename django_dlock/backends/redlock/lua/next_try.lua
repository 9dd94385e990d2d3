-- Notes that the owner tries again, so that a withdrawal of an earlier try that comes late ends no
-- grant of this one. Stands before the guard and the script, in the same step.
--
-- KEYS:
--   script...: those of the guard and the script
--   try: number of the owner's latest try
-- ARGV:
--   script...: those of the guard and the script
--   number: of this try
--   late: ms for which a withdrawal may be late
-- Answer:
--   that of the script
do
  local late, number = table.remove(ARGV), table.remove(ARGV)
  local try = table.remove(KEYS)
  redis.call('SET', try, number, 'PX', late)
end
