# heap.rb SOCKET MEBIBYTES: as heap.py, in one thread.
require "socket"

path, size = ARGV[0], ARGV[1].to_i
heap = {}
(size * 2500).times { |n| heap[n] = format("%020d", n) * 12 }
server = UNIXServer.new(path)
loop do
  client = server.accept
  while (line = client.gets)
    (seed, lookups), sum = line.split.map(&:to_i), 0
    lookups.times do
      seed = seed * 16807 % 2147483647
      sum += heap[seed % heap.size].getbyte(-1)
    end
    client.puts(sum)
  end
  client.close
end
