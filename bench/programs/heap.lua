-- heap.lua MEBIBYTES: as heap.py, one unit of work after the other, a line for each.
local entries = tonumber(arg[1]) * 2500
local heap = {}
for n = 0, entries - 1 do heap[n] = string.format("%020d", n):rep(12) end
local seed = 7
while true do
  local sum = 0
  for _ = 1, 100000 do
    seed = seed * 16807 % 2147483647
    sum = sum + heap[seed % entries]:byte(-1)
  end
  io.write(sum, "\n")
  io.flush()
end
