--[[
Stands in for Slurm: gives a plugin the `slurm` table and an option table like that of cli_filter/lua (values are text, set
through a metatable), calls one of its functions and prints what came of it.

    slurm_host.lua SCRIPT FUNCTION OFFSET [NAME=VALUE ...]
--]]

local arguments = arg
local values = {}
for index = 4, #arguments do
  local name, value = string.match(arguments[index], "^([^=]+)=(.*)$")
  values[name] = value
end

local function show(kind, text)
  print(kind .. "=" .. string.gsub(text, "\n", "\\n"))
end

local function log(kind)
  return function(format, ...) show(kind, string.format(format, ...)) end
end

slurm = { SUCCESS = 0, ERROR = -1, log_info = log("info"), log_user = log("user"), log_error = log("error") }

local proxy = setmetatable({}, {
  __index = function(_, name) return values[name] end,
  __newindex = function(_, name, value)
    if type(name) ~= "string" or type(value) ~= "string" then error("bad argument: string expected") end
    values[name] = value
  end,
})

dofile(arguments[1])
show("returned", tostring(_G[arguments[2]](proxy, tonumber(arguments[3]) or 0, 0)))
for name, value in pairs(values) do show("option:" .. name, value) end
