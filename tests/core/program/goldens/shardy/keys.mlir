// PRNG keys: the dimensions that only their buffers have are never cut
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  sdy.mesh @mesh_0 = <["_axis_0"=4, "_axis_1"=2]>
  func.func public @main(%arg0: tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %arg1: tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {}]>}, %arg2: tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"_axis_0"}, {}]>}, %arg3: tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {}]>}, %arg4: tensor<2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) -> (tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {}]>}, tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, tensor<8x2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {}]>}, tensor<2xui32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
    return %arg0, %arg1, %arg2, %arg3, %arg4 : tensor<8x2xui32>, tensor<8x2xui32>, tensor<8x2xui32>, tensor<8x2xui32>, tensor<2xui32>
  }
}
