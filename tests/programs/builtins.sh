# Builtins only, in a terminal: nothing here starts another process.
declare -A seen
words=(still point turning world neither flesh nor fleshless)
x=12345
for ((round = 0; round < ${1:-300}; round++)); do
  for ((i = 0; i < 60; i++)); do
    ((x = (x * 1103515245 + 12345) & 0x7fffffff))
    word=${words[x % ${#words[@]}]}
    seen[$word]=$((${seen[$word]:-0} + 1))
  done
  if [[ $word =~ ^(.)(.*)$ ]]; then
    printf -v turned '%s%s' "${BASH_REMATCH[2]}" "${BASH_REMATCH[1]}"
  fi
  printf '%4d %-12s %10d %s\n' "$round" "$turned" "$x" "${seen[$word]}"
  read -t 0.005 -r _ # waits a little: nothing is typed yet
done
printf 'what now? '
read -r answer
echo "heard: $answer"
for word in "${words[@]}"; do
  echo "$word ${seen[$word]}"
done
echo done
